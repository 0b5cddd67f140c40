"""Pure decisions: (views, now_s) -> decision + reason. No state is kept here and nothing is done here."""
