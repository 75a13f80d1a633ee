# sources of attach
