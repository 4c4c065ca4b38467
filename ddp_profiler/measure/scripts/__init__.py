"""What only training that is observed needs: a script that knows nothing of us, on one rank."""
