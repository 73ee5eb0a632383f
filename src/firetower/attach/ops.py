class OpsWatch:
    pass
