"""stub"""

CLAIMS = ()
