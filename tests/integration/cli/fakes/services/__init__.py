"""Stand-ins for the services, for tests of the supervisor alone: found before the real ones through PYTHONPATH.

They register, answer health checks and take signals as the real ones do, but compute nothing. What each does wrong is
said by environment variables, FAKE_<NAME> with the name in capitals and underscores:
  exit:CODE  ends at once        silent  never announces itself        refuse  ignores SIGTERM
"""
