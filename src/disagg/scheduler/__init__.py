"""One worker's decisions: queues, block pool, prefix index, hand-offs and batch plan. Events in, actions out.

The live worker and the simulator both drive this code. It reads no clock and opens no socket.
"""
