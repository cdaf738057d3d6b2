"""What several tests share: runs without engines, engines without servers, servers without engines, other processes."""
