"""What both HTTP services share, `confide ui` and `confide encoder serve`: addresses, answers, the server."""
