"""The router's decisions: registry, claims, journal, placement of open requests. Events in, actions out.

Pure and stateful like `scheduler`, and for the same reason: the live router and the simulator both drive it.
"""
