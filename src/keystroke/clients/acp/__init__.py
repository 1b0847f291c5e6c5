"""The Agent Client Protocol (ACP): tasks in editors that host agents."""
