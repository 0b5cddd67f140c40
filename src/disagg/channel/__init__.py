"""Control messages over plain streams: length-prefixed msgpack, heartbeats, end of file is death."""
