"""`omni up`: its screens, its output and its curl line."""
