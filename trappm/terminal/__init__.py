"""Tables, plots and progress bars that fit a terminal."""
