"""The Agent Client Protocol: tasks in editors that host agents."""
