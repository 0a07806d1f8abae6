"""Messages over reliable queue pairs: one queue pair per link, one shared receive queue per device.

Owns everything of the RC message link below the packets; what a packet means is the link's.
"""
