// Lets Python import the library. Its ops are registered as it is loaded, by csrc/torch.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
