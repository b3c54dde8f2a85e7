"""What crosses the process border: a run's specification and the ring. Standard library only."""
