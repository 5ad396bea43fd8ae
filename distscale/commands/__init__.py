"""The commands of ``distscale``. Need the extra ``cli``."""
