"""Starting, watching and stopping the processes of a run on one machine. No torch."""
