"""TraPPM's graph networks as published: autoencoder, regressor, and how any network is trained."""
