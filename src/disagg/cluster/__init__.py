"""Starting, watching and stopping the processes of one deployment."""
