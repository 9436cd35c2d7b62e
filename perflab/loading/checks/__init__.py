"""What stands behind perflab.loading.guards: the readings of a loader, and the rules that judge them."""
