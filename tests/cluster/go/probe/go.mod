module kvoy.dev/cluster/probe

go 1.26.0
