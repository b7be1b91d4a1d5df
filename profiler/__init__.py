"""Models and measurements of their steps; imports no other package of TraPPM, Ray or SQL."""
