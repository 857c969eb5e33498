"""Pure decisions: placement, queue order, backfill, admission and estimates."""
