"""What the store keeps, a module for each kind of row, and the steps that it may take."""
