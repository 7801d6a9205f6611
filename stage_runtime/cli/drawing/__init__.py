"""Pictures of a plan: `arranging` finds places, `picture` says what is drawn, `svg` and `mermaid` write it."""
