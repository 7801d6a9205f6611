"""A request before it is bound: checked, its terminals asked for, its body encoded and sent."""
