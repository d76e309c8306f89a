cuda = "12.6"
