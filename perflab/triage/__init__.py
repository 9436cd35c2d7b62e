"""Where a slow loop spends its time, by interventions. Returns results; draws through `show` alone."""
