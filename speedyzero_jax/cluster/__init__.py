"""Many processes: what they say to each other (`messages`), as bytes (`wire`), and over sockets (`service`, `client`).
Import the module you need."""
