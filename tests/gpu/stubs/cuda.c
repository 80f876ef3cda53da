/* Stands in for libcuda where torch and vLLM load it: every call says that there is no device
 * (CUDA_ERROR_NO_DEVICE), so whatever needs one fails, and what only links against it goes on. */
#define NO_DEVICE 100
#define CALL(name) \
    int name(void) { return NO_DEVICE; }

CALL(cuCtxGetCurrent)
CALL(cuCtxSetCurrent)
CALL(cuDeviceGet)
CALL(cuDeviceGetAttribute)
CALL(cuDeviceGetCount)
CALL(cuDevicePrimaryCtxRetain)
CALL(cuDriverGetVersion)
CALL(cuGetErrorName)
CALL(cuGetErrorString)
CALL(cuGetProcAddress)
CALL(cuGetProcAddress_v2)
CALL(cuInit)
CALL(cuMemAddressFree)
CALL(cuMemAddressReserve)
CALL(cuMemCreate)
CALL(cuMemGetAllocationGranularity)
CALL(cuMemMap)
CALL(cuMemRelease)
CALL(cuMemSetAccess)
CALL(cuMemUnmap)
CALL(cuPointerGetAttribute)
CALL(cuTensorMapEncodeTiled)
