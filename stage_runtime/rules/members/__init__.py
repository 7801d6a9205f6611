"""Members of a coordinator: how they register, how often they report, which groups lack one."""
