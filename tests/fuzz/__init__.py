"""Every RPC with malformed and hostile messages, made from the descriptors."""
