# SPDX-License-Identifier: Apache-2.0
"""For programs whose tests are functions: runs them one by one, tells which failed and why, and how many passed."""
import sys
import traceback


class Outcomes:
    def __init__(self):
        self.passed = self.failed = 0

    def run(self, test, *arguments):
        """Runs a test. Prints the name and the trace of one that fails; the next one runs all the same."""
        try:
            test(*arguments)
            self.passed += 1
            print("ok     ", test.__name__, flush=True)
        except Exception:
            self.failed += 1
            print("FAILED ", test.__name__, flush=True)
            traceback.print_exc(file=sys.stdout)

    def end(self):
        """Prints `N passed, N failed`; the exit code: 1 where one failed, or none ran."""
        print(f"{self.passed} passed, {self.failed} failed")
        return 1 if self.failed or not self.passed else 0
