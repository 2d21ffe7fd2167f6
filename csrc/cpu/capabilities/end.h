// Back to the instructions that every processor of the architecture has.
#if defined(__clang__)
#pragma clang attribute pop
#endif
