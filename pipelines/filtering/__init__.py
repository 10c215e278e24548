"""Drop or mask trajectories and rows."""
