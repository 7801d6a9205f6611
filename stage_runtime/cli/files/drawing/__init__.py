"""Pictures of a plan: `arranging` finds places, `picture` chooses what is drawn, `svg` and `mermaid` write it."""
