"""`orbit doctor`: whether this host can do what orbit would do on it, line by line, with the fix.

Checks read the host through `Host`, so that fake trees work, and give findings; the last stage
moves real bytes under a real grant. Nothing else in the package imports this room but the command
line.
"""
