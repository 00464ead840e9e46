"""The only folder that knows SGLang's versions and names."""
