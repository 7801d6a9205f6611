"""The recorder of a process, and the files that it writes."""
