# sources of core
