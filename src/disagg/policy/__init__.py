"""Pure decisions: (views, now_s) -> decision + reason. Nothing is done here. What a decision learns
(step times, service of tenants) is a value that its owner keeps and feeds."""
