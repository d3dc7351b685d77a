module kvtier/interop/client

go 1.19
