"""Long studies behind one command: evaluate, tune, replay, train the shipped snapshot."""
