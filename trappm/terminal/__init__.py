"""How results are shown: tables, plots and bars that fit a terminal."""
