"""Published peer predictors, trained and evaluated with the same code as TraPPM."""
