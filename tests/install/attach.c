// SPDX-License-Identifier: Apache-2.0
/* What somebody's program needs of the installed library: attaches to argv[1] and says which library it runs with. */
#include <kvstrata/kvstrata.h>
#include <stdio.h>

int main(int argc, char** argv) {
  kvs_session* session = NULL;
  if (argc != 2 || kvs_attach(argv[1], NULL, &session) != KVS_OK) {
    fprintf(stderr, "%s: %s\n", kvs_error_reason(), kvs_error_message());
    return 1;
  }
  printf("%s %s\n", kvs_version(), kvs_transport());
  kvs_detach(session);
  return 0;
}
