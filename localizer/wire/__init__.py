"""What crosses the process border: the run's specification and the shared-memory ring (standard library only)."""
