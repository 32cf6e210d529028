"""What a run would hold, multiply and send, found from shapes before anything is paid for."""
