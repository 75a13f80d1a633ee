# sources of rpc
