"""How good predictors and strategies are: splits, errors, replayed campaigns, tuning."""
