// Lets Python import the library, whose ops csrc/torch registers when it is loaded.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
