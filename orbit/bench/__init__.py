"""`orbit bench`: what moving bytes costs between two processes, by which path, and against what.

Two nodes measure each other over orbit's public interface alone; baselines do the same work without
orbit. Every number says how it came about: the path that ran, what was verified, what it is
compared with. Nothing else in the package imports this room but the command line.
"""
