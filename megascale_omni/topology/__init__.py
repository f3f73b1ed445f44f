"""Where ranks are and what links between them cost: levels, placement, simulator."""
