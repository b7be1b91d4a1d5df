"""Facts of this machine and process, forks, and the data folder."""
